"""MIME types of the data that lectures store for pages without a kernel."""

# A player: `views`, `step` and `speed`, and as `trace` the deflated text of a trace file in base64.
TRACE = "application/vnd.nanovllm.trace+json"
# A player of ranks: `step` and `speed`, and as `ranks` the deflated record of their timelines in
# base64.
RANKS = "application/vnd.nanovllm.ranks+json"
# A prediction that a page asks for (`question`, `unit`, `among`, and `guess` if the notebook has
# one), or, with `measured` and maybe `formula`, the answer; `simulated` is true if the answer was
# simulated.
PREDICTION = "application/vnd.nanovllm.prediction+json"
