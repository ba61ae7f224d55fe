"""What people ask: prompt files and data sets in the common layouts, a small set, text to make more of."""
