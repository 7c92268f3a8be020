"""`dsplan report`: answers and runs as pictures, on one page. `plans` draws for `dsplan ui` too."""
