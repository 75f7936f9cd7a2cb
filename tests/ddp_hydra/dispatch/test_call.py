from __future__ import annotations

import cloudpickle
import pytest
import torch

from ddp_hydra.dispatch.call import pickled


def test_a_function_that_uses_torch_and_says_classes_is_pickled():
    space = {"torch": torch}
    exec("def f(data):\n    return torch.tensor([len(data.classes), len(data.ops)])", space)
    function = space["f"]
    with pytest.raises(TypeError, match="pickle"):
        cloudpickle.dumps(function)

    class Data:
        classes, ops = "ab", "c"

    loaded, data = cloudpickle.loads(pickled((function, Data())))
    assert loaded(data).tolist() == [2, 1]
