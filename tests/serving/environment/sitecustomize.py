"""Lets torchvision load beside a CPU build of torch.

The wheel of the package index is linked against CUDA; without it the library is not loaded, two operators that its
Python half registers kernels for are missing, and the import fails. Their schemas alone are enough for everything that
is used here. Copied into the environment by `make setup-vllm`; does nothing until torchvision is imported.
"""

import sys
from importlib.abc import MetaPathFinder


class _Schemas(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                # Kept alive with the module: a library that goes takes its schemas along.
                self.library = _library = torch.library.Library("torchvision", "DEF")
                sys.modules[__name__]._torchvision = _library
                for operator in ("nms", "qnms"):
                    _library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _Schemas())
