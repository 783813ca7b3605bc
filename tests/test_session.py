"""Krea's streaming session and Self-Forcing's rolling cache, block by block against recorded rollouts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_close, golden
from models import KREA_GEOMETRY, golden_pair, golden_transformer, golden_vae
from small import VAE_CONFIG

from specar_core.backbones.krea import KREA
from specar_core.backbones.session import DECODER_MEMORY, Rolling
from specar_core.backbones.session_start import ENCODER_MEMORY
from specar_core.geometry import Geometry
from specar_core.job import resolve
from specar_core.models.streaming import StreamState
from specar_core.models.vae import Up, VaeConfig, WanVAE
from specar_core.models.wan import KeyValueCache
from specar_core.rollout import rollout
from specar_core.sampling.flow import FlowTable
from specar_core.schedule import Schedule, spread


def bfchw(value):
    """Golden latents are [B, F, C, h, w]; ours are [B, C, F, h, w]."""
    return value.transpose(1, 2)


def recorded_noise(tensors, frames, renoises):
    """The noise tensors of a golden rollout as noise(block, draw)."""

    def noise(block, draw):
        if draw == 0:
            return bfchw(tensors["noise"][:, block * frames : (block + 1) * frames])
        return bfchw(tensors[f"renoise{block * renoises + draw - 1:02d}"][None])

    return noise


class KreaUp(Up):
    """Krea's temporal up-sampler, which deviates from Wan's: for a chunk of one frame the new history is the current
    frame twice, or (zero, current) where the previous last frame was zero. Only its recorded sessions need it."""

    def forward(self, x, tape):
        y = super().forward(x, tape)
        if tape.started and x.shape[1] == 1:
            previous = tape._tails[-1][:, :1]
            tape._tails[-1] = torch.cat([torch.where(previous == 0, 0.0, x), x], dim=1)
        return y


def krea_vae():
    vae = golden_vae()
    first = next(layer for layer in vae.decoder.upsamples if isinstance(layer, Up))
    first.__class__ = KreaUp
    return vae


def play(pair, tensors, blocks, renoises, size=(48, 80), **options):
    """The recorded rollout on our pair; returns per block its result, context latents, keys and predictions."""
    noise = recorded_noise(tensors, pair.geometry.latent_frames, renoises)
    records = []
    model = pair.models["target"]
    spy = SimpleNamespace(caches={}, flows=[])
    call = type(model).forward

    def forward(self, latents, timesteps, text, cache, first_frame, group=None, wanted=None):
        flow = call(self, latents, timesteps, text, cache, first_frame, group, wanted)
        spy.flows.append((latents, timesteps, flow, first_frame, wanted))
        spy.cache = cache
        return flow

    type(model).forward = forward
    try:
        results = rollout(
            pair,
            options.get("schedule", spread(blocks, blocks)),
            lambda block: tensors["prompt_embeds"],
            noise,
            height=size[0],
            width=size[1],
        )
        for result in results:
            records.append(
                SimpleNamespace(
                    result=result,
                    calls=list(spy.flows),
                    keys=torch.stack(spy.cache.keys),
                    values=torch.stack(spy.cache.values),
                    ends=(spy.cache.seen, spy.cache.filled),
                )
            )
            spy.flows.clear()
    finally:
        type(model).forward = call
    return records


def test_krea_decoder_of_the_recorded_sessions():
    tensors, _ = golden("krea/krea_vae")
    z, vae = golden("krea/sf_vae")[0]["z"], krea_vae()
    state, parts = StreamState(), []
    for latent in z.split(1, dim=2):
        frames, state = vae.decode(latent, state)
        parts.append(frames)
    whole = torch.cat(parts, dim=2)
    assert_close(whole, tensors["decode_whole"], 1e-4)
    for block, frames in enumerate(whole.clamp(-1, 1).split([9, 12, 12], dim=2)):
        assert_close(bfchw(frames), tensors[f"vb3.block{block}"], 1e-4)


def test_krea_encoder_is_wans():
    tensors, pixels = golden("krea/krea_vae")[0], golden("krea/sf_vae")[0]["pixels_in"]
    latents, state = golden_vae().encode(pixels)
    for name in ("encode_9frames", "vb3.encode_9frames"):
        expected = tensors[name]
        assert_close(latents if expected.shape == latents.shape else bfchw(latents), expected, 1e-4)
    assert_close(golden_vae().encode(pixels[:, :, :1])[0], tensors["encode_1frame"], 1e-4)
    following = golden_vae().encode(pixels[:, :, :8], state)[0]
    expected = tensors["vb3.encode_stream_next8"]
    assert_close(following if expected.shape == following.shape else bfchw(following), expected, 1e-4)


SESSIONS = ["steps4_kv3", "steps5_kv3", "steps4_kv3_keepfirst", "steps4_kv6", "default4_sfvae"]


@pytest.mark.parametrize("name", SESSIONS)
def test_session(name):
    tensors, meta = golden(f"krea/krea_session_{name}")
    params, steps = meta["params"], tensors["denoising_steps"].tolist()
    context_frames = params.get("kv_cache_num_frames", 3)
    vae = golden_vae() if params.get("vae") == "original" else krea_vae()
    pair = golden_pair(
        steps=steps, vae=vae, context_frames=context_frames, anchor_first_latent=params.get("keep_first_frame", False)
    )
    records = play(pair, tensors, blocks=5, renoises=len(steps) - 1)

    assert [r.result.frames.shape[2] for r in records] == meta["frames_emitted_per_block"]
    for block, record in enumerate(records):
        assert record.result.forwards == len(steps)
        seen = 0 if block == 0 else min(3 * block, context_frames)
        latents, _, _, _, _ = record.calls[0]
        if block:
            assert_close(bfchw(latents[:, :, :seen]), tensors[f"block{block}.context_latents"], 1e-4)
        for layer in range(2):
            if f"block{block}.recompute.layer{layer}.k" in tensors:
                own = slice(0, seen * 15)
                assert_close(record.keys[layer][:, own], tensors[f"block{block}.recompute.layer{layer}.k"], 1e-4)
                assert_close(record.values[layer][:, own], tensors[f"block{block}.recompute.layer{layer}.v"], 1e-4)
        first_call = 1 if block else 0  # the reference's call 0 of a later block is the context pass by itself
        for index, (x, times, flow, _, _) in enumerate(record.calls):
            key = f"block{block}.call{index + first_call}.x0"
            if key in tensors:
                x0 = FlowTable(5).x0_from_flow(flow, x[:, :, -3:], times[0, -1].item())
                assert_close(bfchw(x0), tensors[key], 1e-4)
        assert_close(bfchw(record.result.latents), tensors[f"block{block}.latent"], 1e-4)
        if f"pixels.block{block}" in tensors:
            frames = bfchw(record.result.frames)[..., ::3, ::4]
            assert_close(frames, tensors[f"pixels.block{block}"], 2e-3)
    assert_close(bfchw(torch.cat([r.result.latents for r in records], dim=2)), tensors["latents"], 1e-4)


@pytest.mark.parametrize(
    "name, vae, options", [("default4_sfvae", golden_vae, {}), ("steps5_kv3", krea_vae, {"terminal_step": True})]
)
def test_what_krea_ships_is_what_was_recorded(name, vae, options):
    """Steps, shift, window and last step as the backbone itself gives them to its pair."""
    tensors, meta = golden(f"krea/krea_session_{name}")
    job, _ = resolve(KREA, width=80, height=48, blocks=5, schedule="target-only", options=options)
    pair = KREA.pair({"target": golden_transformer("krea/krea_session_steps4_kv3")}, vae(), job, "sdpa")
    results = [record.result for record in play(pair, tensors, 5, renoises=len(pair.steps["target"]) - 1)]
    assert [result.frames.shape[2] for result in results] == meta["frames_emitted_per_block"]
    assert sum(result.forwards for result in results) == job.forwards["target"]
    for block, result in enumerate(results):
        assert_close(bfchw(result.latents), tensors[f"block{block}.latent"], 1e-4)


def test_krea_drafts_with_the_same_steps():
    assert KREA.steps["drafter"] == KREA.steps["target"]


@pytest.mark.parametrize("name", ["steps4_kv3", "steps4_kv6"])
def test_context_pass_by_itself_gives_the_recorded_flow(name):
    """The rollout fuses this pass with the first evaluation and never looks at its flow; here it stands alone."""
    tensors, _ = golden(f"krea/krea_session_{name}")
    model = golden_pair().models["target"]
    text = model.encode_text(tensors["prompt_embeds"])
    for block in range(1, 5):
        latents = bfchw(tensors[f"block{block}.context_latents"])
        frames = latents.shape[2]
        flow = model(latents, torch.zeros(1, frames), text, KeyValueCache(model, 1, frames, 15), 0, group=3)
        assert_close(bfchw(flow), tensors[f"block{block}.recompute.flow"], 1e-4)


ROLLING = ["global", "win6", "win6_sink1", "win7_sink2", "win4_fpb1_sink1"]


@pytest.mark.parametrize("name", ROLLING)
def test_rolling_cache(name):
    tensors, meta = golden(f"krea/sf_rollout_{name}")
    frames, blocks, window = meta["frames_per_block"], meta["blocks"], meta["local_attn_size"]
    steps = tensors["denoising_steps"].tolist()
    geometry = Geometry(fps=16, latent_frames=frames, size_multiple=16)
    rolling = Rolling(window if window > 0 else meta["cache_tokens"] // 15, meta["sink_size"])
    pair = golden_pair(
        "krea/sf_rollout_global", steps, geometry=geometry, rolling={"target": rolling}, context_frames=frames
    )
    records = play(pair, tensors, blocks, renoises=len(steps) - 1)
    for block, record in enumerate(records):
        assert record.result.forwards == len(steps) + 1
        for index, (x, times, flow, first, wanted) in enumerate(record.calls):
            number = block * (len(steps) + 1) + index
            assert [times[0, 0].item(), first * 15] == pytest.approx(meta["calls_t_and_current_start"][number])
            if wanted == 0:
                continue  # the clean pass stops at the last layer's keys and values
            if f"call{number:02d}.flow" in tensors:
                assert_close(bfchw(flow), tensors[f"call{number:02d}.flow"], 2e-5)
            if f"call{number:02d}.x0" in tensors:
                x0 = FlowTable(5).x0_from_flow(flow, x, times[0, 0].item())
                assert_close(bfchw(x0), tensors[f"call{number:02d}.x0"], 2e-5)
        for layer in range(2):
            assert list(record.ends) == tensors[f"kv.block{block}.layer{layer}.end"].tolist()
            if f"kv.block{block}.layer{layer}.k" in tensors:
                held = slice(0, record.ends[1])
                for name, found in (("k", record.keys[layer]), ("v", record.values[layer])):
                    assert_close(found[:, held], tensors[f"kv.block{block}.layer{layer}.{name}"][:, held], 2e-5)
    assert_close(bfchw(torch.cat([r.result.latents for r in records], dim=2)), tensors["latents"], 2e-5)


def test_context_frames_must_be_whole_blocks():
    with pytest.raises(ValueError, match="4 context frames"):
        golden_pair(context_frames=4)


def test_geometry_of_the_pair_is_the_decoders():
    pair = golden_pair(geometry=replace(KREA_GEOMETRY, dropped=0))
    tensors, _ = golden("krea/krea_session_default4_sfvae")
    records = play(pair, tensors, 2, 3, schedule=Schedule(2, (0,)))
    assert [r.result.frames.shape[2] for r in records] == [KREA_GEOMETRY.first_frames, KREA_GEOMETRY.later_frames]


def reach(coder, parts):
    """Latent frames that histories of NaN reach, for a latent frame a part. NaN goes wherever they do, however little
    they would change."""
    first, *later = parts
    _, state = coder(first)
    state = replace(state, tails=tuple(torch.full_like(tail, float("nan")) for tail in state.tails))
    reached = []
    for part in later:
        result, state = coder(part, state)
        reached.append(bool(result.isnan().any()))
    assert reached == sorted(reached, reverse=True) and not reached[-1]
    return sum(reached)


@torch.inference_mode()
def reaches(device):
    """Of the decoder and of the encoder of a VAE of the real one's shape."""
    assert VAE_CONFIG.residual_blocks == VaeConfig().residual_blocks == 2
    vae, generator = WanVAE(VAE_CONFIG).eval(), torch.Generator().manual_seed(0)
    for value in vae.parameters():
        value.copy_(torch.randn(value.shape, generator=generator))
    vae = vae.to(device).arrange()
    latents = torch.randn(1, 16, 2 + 48, 1, 1, generator=generator)
    frames = torch.randn(1, 3, 5 + 4 * 35, 8, 8, generator=generator)
    parts = latents.split([2, *[1] * 48], dim=2), frames.split([5, *[4] * 35], dim=2)
    return reach(vae.decode, parts[0]), reach(vae.encode, parts[1])


def test_coders_that_forgot_work_alike_after_38_and_28_latent_frames_on_a_cpu():
    """And a GPU's later, which is what the constants are for: tests/test_gpu.py."""
    decoder, encoder = reaches("cpu")
    assert (decoder, encoder) == (38, 28) and decoder <= DECODER_MEMORY and encoder <= ENCODER_MEMORY
