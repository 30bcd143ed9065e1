"""Speaks OpenAI's API over HTTP, and shows the engine's live page (lecture 91).

options       flags that are fields of a dataclass
commandline   the parser, the errors and the flags that the commands share
errors        errors in OpenAI's shape
protocol      the bodies of requests: fields, defaults, checks
responses     answers and chunks of streams
generation    one HTTP request as one or several engine requests
completions   /v1/completions
chat          /v1/chat/completions
access        which clients may use a server, and how much it accepts from them: settings, flags, limits
middleware    checks of host, origin, key and body, before a request reaches the application
json_limits   limits of a body's contents
connections   deadlines for a request's headers and body, and a limit on connections
shares        how many requests may wait, and how many of them may have the same key
rendering     the queue of chats that wait for the chat template
streams       responses that are sent piece by piece
metrics       /metrics
page          the page that shows the engine at work, its files, and recorded traces
app           the routes
signalled     a web server that ends at a signal
run           the server's process
"""
