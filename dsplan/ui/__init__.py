"""`dsplan ui`: the questions of `dsplan recommend` on a page, answered by processes that a long search cannot block."""
