"""One address in front of several servers: sends each request to prefill and decode engines (lecture 31).

command       the command `nanovllm router`, and how it routes
policies      which server gets a request
backends      the servers: what they are asked, how they are
call          a client's request, and what becomes of it
app           the routes, and how a request is taken from prefill to decode
metrics       /metrics
run           the router's server
fleet         `nanovllm serve --prefill N --decode M`: servers and router together
"""
