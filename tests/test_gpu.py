"""What only a CUDA device can show: its kernels compute what the CPU computes. Skipped without one."""

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, golden
from models import golden_pair, golden_transformer, golden_vae
from test_session import play, reaches
from test_wan import PROMPT, TOKENS, noise

from specar_core.backbones.session import DECODER_MEMORY
from specar_core.backbones.session_start import ENCODER_MEMORY
from specar_core.models import rowwise
from specar_core.models.attention import BACKENDS, Absent, choose, probe, self_test
from specar_core.models.compiled import compile_blocks
from specar_core.models.graphs import Forwards
from specar_core.models.low_precision import Fp8Linear, quantised, unavailable
from specar_core.models.streaming import Causal, StreamState, kernels
from specar_core.models.wan import KeyValueCache

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


@torch.inference_mode()
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float16, 3e-2)])
def test_vae(dtype, tolerance):
    tensors, vae = golden("krea/sf_vae")[0], golden_vae().to("cuda", dtype).arrange()
    state, parts = StreamState(), []
    for block in tensors["z"].cuda().split(3, dim=2):
        frames, state = vae.decode(block, state)
        parts.append(frames)
    assert_close(torch.cat(parts, dim=2).float().cpu(), tensors["decode_whole"], tolerance)
    assert_close(vae.encode(tensors["pixels_in"].cuda())[0].cpu(), tensors["encode_9frames"], tolerance)


@torch.inference_mode()
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float16, 4e-2)])
def test_fewer_products_are_the_same_frames(dtype, tolerance):
    z, vae = golden("krea/sf_vae")[0]["z"].cuda(), golden_vae().to("cuda", dtype).arrange()
    frames, state = vae.decode(z)
    latents, _ = vae.encode(frames)
    convolutions = [layer for layer in vae.modules() if isinstance(layer, Causal) and layer.tap_sums is not None]
    assert {layer.together for layer in convolutions} == {2, 4}
    for layer in convolutions:
        layer.arranged = False
    plain, plain_state = vae.decode(z)
    assert_close(frames.float(), plain.float(), tolerance)
    assert_close(latents, vae.encode(frames)[0], tolerance)
    for ours, theirs in zip(state.tails, plain_state.tails, strict=True):
        if ours is not None:
            assert_close(ours.float(), theirs.float(), tolerance)


@torch.inference_mode()
def test_vae_without_cudnn():
    """Its convolutions lie otherwise in memory."""
    tensors, vae = golden("krea/sf_vae")[0], golden_vae().cuda().arrange()
    with torch.backends.cudnn.flags(enabled=False):
        assert_close(vae.decode(tensors["z"].cuda())[0].cpu(), tensors["decode_whole"], 1e-4)


def test_fewer_products_reach_as_far_as_is_replayed():
    assert reaches("cuda") == (DECODER_MEMORY, ENCODER_MEMORY)


@pytest.mark.parametrize("how", ["as loaded", "joined and recorded", "compiled"])
def test_session(how):
    tensors, meta = golden("krea/krea_session_default4_sfvae")
    pair = golden_pair(steps=tensors["denoising_steps"].tolist(), vae=golden_vae().cuda().arrange())
    for model in pair.models.values():
        model.cuda()
    if how == "compiled":
        compile_blocks(pair.models["target"])
    elif how == "joined and recorded":
        pair.models["target"].join()
    tensors = {name: value.cuda() for name, value in tensors.items()}
    latents = torch.cat([r.result.latents for r in play(pair, tensors, 5, 3)], dim=2).cpu()
    assert_close(latents.transpose(1, 2), tensors["latents"].cpu(), 1e-3)


def test_kernels_between_the_products_are_plain_torch(monkeypatch):
    """Joined or not, with a batch, a context pass and a step, in float32."""
    model = golden_transformer("krea/krea_session_steps4_kv3").cuda()
    prompt, latents = PROMPT.cuda().expand(2, -1, -1), noise(6).cuda().expand(2, -1, -1, -1, -1)
    clean, noisy = (torch.full((2, 3), t, device="cuda") for t in (0.0, 625.0))

    @torch.inference_mode()
    def flow():
        cache, text = KeyValueCache(model, 2, 6, TOKENS), model.encode_text(prompt)
        first = model(latents, torch.cat([clean, noisy], dim=1), text, cache, 0, group=3, wanted=3)
        return torch.cat([first, model(latents[:, :, 3:], noisy, text, cache, 3)])

    assert rowwise.kernels(latents) is None
    fused = flow()
    model.join()
    joined = flow()
    monkeypatch.setattr(rowwise, "kernels", lambda *tensors: None)
    assert_close(fused, flow(), 1e-5)
    assert_close(joined, fused, 1e-5)


@torch.inference_mode()
def test_recorded_forwards_follow_a_new_prompt():
    model = golden_transformer("krea/krea_session_steps4_kv3").cuda()
    model.join()
    latents, times = noise(3).cuda(), torch.full((1, 3), 625.0, device="cuda")
    caches = [KeyValueCache(model, 1, 3, TOKENS) for _ in range(2)]
    recorded = Forwards(model, caches[0])
    texts = [model.encode_text(strength * PROMPT.cuda()) for strength in (1, -1)]
    for text in (0, 0, 0, 1, 0, 1, 1):
        expected = model(latents, times, texts[text], caches[1], 0)
        assert_close(recorded(latents, times, texts[text], 0), expected, 1e-5)


def test_fp8_is_what_the_cpu_computes():
    if reason := unavailable(torch.device("cuda")):
        pytest.skip(reason)
    x = torch.randn(96, 512, generator=torch.Generator().manual_seed(0)).cuda()
    with torch.inference_mode():
        (values, scale), expected = rowwise.kernels(x).quantised(x), quantised(x)
        rows, rows_scale = rowwise.kernels(x).quantised(x, gelu=True)
    assert torch.equal(values.float(), expected.values.float()) and torch.equal(scale, expected.scale)
    after = quantised(F.gelu(x, approximate="tanh"))
    assert_close(rows_scale, after.scale, 1e-5)
    assert (rows.float() != after.values.float()).float().mean() < 0.01  # rounded the other way
    layer = Fp8Linear(512, 256)
    layer.load(torch.randn(256, 512, generator=torch.Generator().manual_seed(1)))
    layer.bias.data = torch.zeros(256, dtype=torch.bfloat16)
    on_cpu = layer(x.cpu()).float()
    found = layer.cuda()(expected).float().cpu()
    assert (found - on_cpu).norm() / on_cpu.norm() < 5e-3


def test_no_wait_for_the_device_inside_a_block():
    tensors, _ = golden("krea/krea_session_default4_sfvae")
    pair = golden_pair(steps=tensors["denoising_steps"].tolist(), vae=golden_vae().cuda().arrange())
    for model in pair.models.values():
        model.cuda()
    prompt, shape = tensors["prompt_embeds"].cuda(), tensors["latents"][:, :3].transpose(1, 2).shape
    height, width = 8 * shape[3], 8 * shape[4]
    with pair.lease(height, width, 1, lambda step: None) as run:
        context = run.begin()
        for block in range(3):
            torch.cuda.set_sync_debug_mode("error" if block == 2 else "default")  # when everything is compiled
            try:
                latents = run.generate("target", context, prompt, lambda draw: torch.randn(shape))
                _, context = run.commit(context, latents, prompt)
            finally:
                torch.cuda.set_sync_debug_mode("default")


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
