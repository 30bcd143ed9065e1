"""`nanovllm bench parallel`: what it costs that several processes compute together, part by part.

On a machine whose cores are all busy anyway, more ranks make nothing faster. So what is measured are ratios within one run,
and how close each way of dividing comes to what theory says that it must cost.
"""
