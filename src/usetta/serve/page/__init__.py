"""The web page at `/`: an image goes in, the answers of several methods come out with the views that made them.

The page is made with Gradio, of which only a few addresses are let through (`routes`): an image comes in the body of a
request and stays in memory, and nothing here reads a file or an address that a caller names. `layout` is what one sees
before an answer, `calls` has the functions behind it, and `show` makes HTML of the answers.
"""
