"""How the tiny pair was made: data, training stages, scores. Not part of the installed package."""
