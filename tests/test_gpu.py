"""What only a CUDA device can show: its kernels compute what the CPU computes. Skipped without one."""

import pytest
import torch
from conftest import assert_close, golden
from models import golden_pair, golden_vae
from test_session import play

from specar_core.models.attention import BACKENDS, Absent, choose, probe, self_test
from specar_core.models.compiled import compile_blocks
from specar_core.models.vae import kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def _exact_float32():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_vae_kernels_are_there():
    x = torch.zeros(1, device="cuda")
    assert kernels(x) is None  # gradients may be wanted
    with torch.inference_mode():
        assert kernels(x) is not None


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float16, 3e-2)])
def test_vae(dtype, tolerance):
    tensors, vae = golden("krea/sf_vae")[0], golden_vae().to("cuda", dtype).arrange()
    state, parts = None, []
    for block in tensors["z"].cuda().split(3, dim=2):
        frames, state = vae.decode(block, state)
        parts.append(frames)
    assert_close(torch.cat(parts, dim=2).float().cpu(), tensors["decode_whole"], tolerance)
    assert_close(vae.encode(tensors["pixels_in"].cuda())[0].cpu(), tensors["encode_9frames"], tolerance)


@pytest.mark.parametrize("compiled", [False, True])
def test_session(compiled):
    tensors, meta = golden("krea/krea_session_default4_sfvae")
    pair = golden_pair(steps=tensors["denoising_steps"].tolist(), vae=golden_vae().cuda().arrange())
    for model in pair.models.values():
        model.cuda()
    if compiled:
        compile_blocks(pair.models["target"])
    tensors = {name: value.cuda() for name, value in tensors.items()}
    latents = torch.cat([r.result.latents for r in play(pair, tensors, 5, 3)], dim=2).cpu()
    assert_close(latents.transpose(1, 2), tensors["latents"].cpu(), 1e-3)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_attention(backend):
    device = torch.device("cuda")
    try:
        attend = probe(backend, device, torch.bfloat16)
    except Absent as absent:
        pytest.skip(str(absent))
    assert self_test(attend, device, torch.bfloat16) < 0.005


def test_the_choice_on_hopper():
    if torch.cuda.get_device_capability() == (9, 0):
        assert choose(torch.device("cuda"), torch.bfloat16).name in ("flash3", "cudnn")
