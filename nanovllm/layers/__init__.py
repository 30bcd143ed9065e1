"""Linear, norm and embedding layers, tensor-parallel and quantized (lectures 10, 22, 41)."""
