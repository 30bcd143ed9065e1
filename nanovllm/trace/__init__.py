"""Records each step as plain data; figures, the live page and Perfetto exports read this one record
(lecture 13)."""
