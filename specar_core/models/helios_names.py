"""Parameter names of Helios files that are older than diffusers' layout, or written with Wan 2.1's own names."""

import re

_RENAMED = tuple(
    (re.compile(old), new)
    for old, new in (
        (r"^scale_shift_table$|^head\.modulation$", "norm_out.scale_shift_table"),
        (r"^head\.head\.", "proj_out."),
        (r"^time_projection\.1\.", "condition_embedder.time_proj."),
        (r"^(time|text)_embedding\.0\.", r"condition_embedder.\1_embedder.linear_1."),
        (r"^(time|text)_embedding\.2\.", r"condition_embedder.\1_embedder.linear_2."),
        (r"\.self_attn\.", ".attn1."),
        (r"\.cross_attn\.", ".attn2."),
        (r"\.([qkv])\.", r".to_\1."),
        (r"\.o\.", ".to_out.0."),
        (r"\.norm3\.", ".norm2."),
        (r"\.ffn\.0\.", ".ffn.net.0.proj."),
        (r"\.ffn\.2\.", ".ffn.net.2."),
        (r"\.modulation$", ".scale_shift_table"),
    )
)


def helios_name(name: str) -> str:
    """The name in `HeliosTransformer` of a stored parameter; names that are right already stay."""
    for old, new in _RENAMED:
        name = old.sub(new, name)
    return name
