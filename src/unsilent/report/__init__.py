"""From events to something that people read."""
