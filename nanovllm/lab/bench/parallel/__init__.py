"""`nanovllm bench parallel`: what it costs that several processes compute together, part by part.

On a machine whose cores are all busy, more ranks make nothing faster. The parts measure ratios
within one run, and how close each way of dividing an engine comes to its cost in theory."""
