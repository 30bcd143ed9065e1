"""`nanovllm bench gpu`: tests and measures the engine on a machine with an NVIDIA GPU, in ten
minutes.

proofs      runs tests/gpu
machine     what was found, and the two ceilings that figures are compared with
attention   decode, latent decode and prefill alone
nccl        collectives on two GPUs, beside the cost model
end_to_end  whole models of random weights, beside transformers
"""
