"""What the training stages rely on: their shortcuts compute what a rollout computes."""

import pytest
import torch

from specar_core.backbones.causal_wan import SHIFT, STEPS, times
from specar_core.backbones.tiny import VAE_CONFIG
from specar_core.models.tiny_text import TinyText
from specar_core.models.vae import MEAN, STD, WanVAE
from specar_core.models.wan import CausalWan, KeyValueCache, WanConfig
from specar_core.sampling.flow import FlowTable
from training.captions import parse
from training.flow import LEVELS, OneForward, mixed, sigma_at
from training.latents import Latents, caption_ids, vocabulary
from training.shapes import sample_scene
from training.target import TEXT, terse
from training.vae import initialise, normalise, through

CONFIG = WanConfig(dim=24, ffn_dim=32, num_layers=2, num_heads=2, freq_dim=16, text_dim=8, text_len=4)


@pytest.fixture(scope="module")
def vae():
    torch.manual_seed(0)
    model = WanVAE(VAE_CONFIG)
    initialise(model)
    for name, parameter in model.named_parameters():
        if name.endswith("residual.6.weight"):  # as after some training
            torch.nn.init.normal_(parameter, std=0.02)
    return model.requires_grad_(False)


def test_a_whole_clip_is_coded_as_the_stream_is(vae):
    clip = torch.randn(1, 3, 9, 16, 32)
    latents, _ = vae.encode(clip)
    hidden = through(vae.encoder, clip.permute(0, 2, 3, 4, 1))
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    whole = (vae.conv1(hidden)[..., : VAE_CONFIG.channels] - mean) / std
    torch.testing.assert_close(whole.permute(0, 4, 1, 2, 3), latents, atol=1e-5, rtol=1e-4)
    frames, _ = vae.decode(latents)
    decoded = through(vae.decoder, vae.conv2(latents.permute(0, 2, 3, 4, 1) * std + mean))
    torch.testing.assert_close(decoded.permute(0, 4, 1, 2, 3), frames, atol=1e-5, rtol=1e-4)


def test_normalising_changes_the_latents_and_not_the_frames(vae):
    clips = torch.randint(0, 256, (2, 3, 9, 16, 32), dtype=torch.uint8)
    true = clips.float() / 127.5 - 1
    before, _ = vae.decode(vae.encode(true)[0])
    normalise(vae, clips)
    latents, _ = vae.encode(true)
    channels = latents.transpose(0, 1).flatten(1)
    torch.testing.assert_close(channels.mean(1), torch.zeros(16), atol=1e-3, rtol=0)
    torch.testing.assert_close(channels.std(1), torch.ones(16), atol=1e-3, rtol=0)
    torch.testing.assert_close(vae.decode(latents)[0], before, atol=1e-4, rtol=1e-3)


def test_one_forward_predicts_what_the_cache_does():
    torch.manual_seed(0)
    model = CausalWan(CONFIG)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    latents, t = torch.randn(2, 16, 6, 4, 4), torch.tensor([[0.0] * 3 + [625.0] * 3] * 2)
    text = model.encode_text(torch.randn(2, 4, 8))
    with torch.autocast("cpu", torch.bfloat16):
        flow = model(latents, t, text, OneForward(model, 2, 6 * 4), 0, group=3, wanted=3)
    flow.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        cached = model(latents, t, text, KeyValueCache(model, 2, 6, 4), 0, group=3, wanted=3)
    torch.testing.assert_close(flow, cached, atol=0.02, rtol=0.02)  # keys and values pass through bfloat16


def test_levels_are_those_of_a_rollout():
    table = FlowTable(SHIFT)
    assert sigma_at(torch.arange(LEVELS)).tolist() == pytest.approx([table.sigma(t) for t in times(STEPS["target"])])
    x0, noise = torch.randn(2, 1, 2, 1, 1, 1)
    torch.testing.assert_close(mixed(x0, noise, torch.tensor([table.sigma(625.0)])), table.renoise(x0, noise, 625.0))


def test_windows_are_the_contexts_of_a_session():
    """Latent frames 0..8 and, as 9..11, the images that latent frames 1, 2 and 3 end with."""
    data = Latents(torch.arange(12.0).view(1, 1, 12, 1, 1), torch.ones(1, 2, 4, dtype=torch.long))
    context, block, ids = data.later(200)
    seen = {tuple(row.int().tolist()) for row in torch.cat([context, block], dim=2).flatten(1)}
    assert seen == {(0, 1, 2, 3, 4, 5), (9, 2, 3, 4, 5, 6), (10, 3, 4, 5, 6, 7), (11, 4, 5, 6, 7, 8)}
    assert data.first(3)[0].flatten(1).tolist() == [[0, 1, 2]] * 3 and ids.shape == (200, 4)


def test_the_vocabulary_covers_every_caption():
    scenes = [sample_scene(seed) for seed in range(200)]
    ids = caption_ids(scenes, torch.device("cpu"))
    words = vocabulary()
    for scene, rows in zip(scenes, ids.tolist(), strict=True):
        for i, row in enumerate(rows):
            read = parse(" ".join(words[index - 1] for index in row if index))
            assert read == scene.description
            assert len(scene.description.caption(scene.wording + i).replace(",", "").split()) == sum(map(bool, row))


def test_terse_captions_keep_the_order_of_their_words():
    torch.manual_seed(0)
    ids = torch.arange(1, 9).expand(400, 8)
    rows = terse(torch.cat([ids, torch.zeros(400, 4, dtype=torch.long)], dim=1)).tolist()
    kept = [[index for index in row if index] for row in rows]
    assert all(row[: len(words)] == words == sorted(words) for row, words in zip(rows, kept, strict=True))
    assert 0.05 < sum(len(words) < 8 for words in kept) / 400 < 0.25


def test_unknown_words_change_nothing():
    text = TinyText(**TEXT)
    prompt = "a large red ball bouncing fast on a plain grey background"
    assert text.tokenize(prompt) == text.tokenize(prompt.replace("large", "wonderful large, UNKNOWN").upper())
