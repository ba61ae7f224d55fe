"""What people ask: prompt files and data sets in the common layouts, and a small set of our own."""
