"""Lets PyPI's torchvision and torchaudio be imported beside a CPU-only torch; setup_host.sh installs it for tests.

ComfyUI imports both, but their x86_64 wheels are CUDA builds whose C++ libraries do not load without CUDA. All that the
import needs of them are the schemas of the two operators for which torchvision registers fakes, and torchaudio's
extension module, which loads its library. Transforms and resampling are pure Python and work; C++ operators do not.
A `.pth` file loads this in every process, so nothing is imported before torchvision or torchaudio is.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec


class Shims(MetaPathFinder, Loader):
    def __init__(self):
        self.operators = None  # torch forgets the schemas when their library goes

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and self.operators is None:
            import torch

            if torch.version.cuda is None:
                self.operators = torch.library.Library("torchvision", "FRAGMENT")
                for operator in ("nms", "qnms"):
                    self.operators.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        if name == "torchaudio._extension":
            import torch

            if torch.version.cuda is None:
                return ModuleSpec(name, self)
        return None

    def exec_module(self, module):
        module._IS_TORCHAUDIO_EXT_AVAILABLE = module._IS_ALIGN_AVAILABLE = False
        module._check_cuda_version = lambda: None
        module.fail_if_no_align = lambda function: function


sys.meta_path.insert(0, Shims())
