"""Axis letters used in einsums, shapes, comments and sharding tables.

| letter | axis                          | letter | axis                      |
|--------|-------------------------------|--------|---------------------------|
| B      | batch                         | N      | query heads               |
| T      | query tokens                  | K      | KV heads                  |
| S      | key tokens                    | G      | N / K, queries per KV head|
| D      | model width                   | H      | head dim                  |
| E      | embedding width (OPT-350m)    | R      | stored q/k coordinates    |
| F      | FFN width                     | Z      | stored v/o coordinates    |
| V      | vocabulary                    | L      | layers                    |
| M      | recent keys: sinks + window   | P      | learned positions         |
"""

import jax
import numpy as np

Array = jax.Array
AnyArray = jax.Array | np.ndarray
