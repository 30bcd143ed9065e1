"""One address in front of several servers: sends each request to prefill and decode engines
(lecture 31).

config        how it routes, and its flags
command       the command `nanovllm router`
policies      which server gets a request, as functions of plain state
pool          the servers of one role, and what the policies are told about them
backends      the servers: what they are asked, how they are
call          a client's request, and what becomes of it
app           the routes, metrics, and how a request is taken from prefill to decode
run           the router's server
fleet         `nanovllm serve --prefill N --decode M`: servers and router together
"""
