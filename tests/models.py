"""Tiny models with the weights that the golden files carry, and a pair made of them."""

from conftest import golden, weights

from specar_core.backbones.causal_wan import GEOMETRY as KREA_GEOMETRY
from specar_core.backbones.session import SessionPair
from specar_core.models.vae import VaeConfig, WanVAE
from specar_core.models.wan import CausalWan, WanConfig


def shapes(state):
    return {name: tuple(value.shape) for name, value in state.items()}


def golden_transformer(name):
    tensors, meta = golden(name)
    state, cfg = weights(tensors), meta["cfg"]
    config = WanConfig.detect(shapes(state), {"num_heads": cfg["num_heads"], "text_len": cfg["text_len"]})
    assert (config.dim, config.ffn_dim, config.num_layers) == (cfg["dim"], cfg["ffn_dim"], cfg["num_layers"])
    model = CausalWan(config)
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)


def golden_vae():
    state = weights(golden("krea/sf_vae")[0])
    vae = WanVAE(VaeConfig.detect(shapes(state)))
    vae.load_state_dict(state)
    return vae.eval().requires_grad_(False)


def golden_pair(transformer="krea/krea_session_steps4_kv3", steps=(1000.0, 937.5, 833.3333, 625.0), **options):
    """One set of weights in both roles, unless `drafter` names other weights."""
    target = golden_transformer(transformer)
    drafter = golden_transformer(options.pop("drafter")) if "drafter" in options else target
    options.setdefault("geometry", KREA_GEOMETRY)
    return SessionPair(
        models={"target": target, "drafter": drafter},
        vae=options.pop("vae", None) or golden_vae(),
        steps={"target": steps, "drafter": steps},
        **options,
    )
