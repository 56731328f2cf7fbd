"""What each request used, and the file in which that is kept."""
