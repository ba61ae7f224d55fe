"""Starting a serving engine with a plan, proving that its speculation works, and stopping it cleanly."""
