"""Helpers for tests of twins: random weights for a PyTorch module, and its arrays by name."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


def drawn(twin: Any) -> Any:
    """Draw all weights at random, including norms; variances stay above zero."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, x in twin.state_dict().items():
            if x.is_floating_point():
                scale = x.dim() == 1 and name.endswith(("weight", "var"))
                new = 0.5 + torch.rand_like(x) if scale else torch.randn_like(x)
                x.copy_(new * x[0].numel() ** -0.5 if x.dim() > 1 else new)
    return twin.eval()


def weights(twin: Any) -> dict[str, np.ndarray]:
    """Return copies of a module's arrays."""
    return {name: x.numpy().copy() for name, x in twin.state_dict().items()}
