"""`dsplan report`: answers and runs as pictures, on one page."""
