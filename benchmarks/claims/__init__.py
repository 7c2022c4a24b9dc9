"""What feedline claims about itself: a script for each question."""
