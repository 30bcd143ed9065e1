"""One address in front of several servers: sends each request to prefill and decode engines (lecture 31).

config        how it routes, and its flags
policies      which server gets a request
backends      the servers: what they are asked, how they are
app           the routes, and how a request is taken from prefill to decode
metrics       /metrics
run           the command `nanovllm router`
fleet         `nanovllm serve --prefill N --decode M`: servers and router together
"""
