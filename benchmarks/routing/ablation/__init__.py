"""What each part of `learned` brings."""
