"""Where the proofs run."""

import torch

from nanovllm.ops.support import is_interpreted

ON_GPU = torch.cuda.is_available() and not is_interpreted()
DRY_RUN = is_interpreted()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
