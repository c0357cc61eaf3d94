"""Where metrics go: files, the terminal, and whatever else keeps the `Tracker` contract."""
