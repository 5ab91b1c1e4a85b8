"""What the commands around training do: index, lint."""
