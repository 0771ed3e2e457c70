"""One self-contained page that compares runs."""
