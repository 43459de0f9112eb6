"""miles' converter from Hugging Face to NVFP4: TransformerEngine's blocks, stored with a decode multiplier.

The stored scale is 1/enc with TransformerEngine's enc. This is not A/2688: for about 30 % of amaxes the last bit
differs. An all-zero tensor stores 2.9387359e-39. The gate and up projections of one expert share one A: give both of
them the larger amax as `global_amax`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from halfbyte.contracts import expressions
from halfbyte.contracts.options import changed, check_choice, check_name, error_name, listing_options
from halfbyte.contracts.peers.transformer_engine import FOUR_SIX
from halfbyte.contracts.peers.transformer_engine import NVFP4 as TE_NVFP4
from halfbyte.contracts.spec import Contract
from halfbyte.methods import Amax, FourSix, Method

NVFP4 = dataclasses.replace(
    TE_NVFP4,
    stored_as="multiplier",
    stored=expressions.store_reciprocal,
    multiplier=expressions.as_stored,
    decode=expressions.decode_by_multiplier,
    tiles=((1, 16),),
    row_scaling=False,
    four_six=dataclasses.replace(FOUR_SIX, default=FourSix(e4m3_max=256)),
)

VARIABLES = ("NVTE_NVFP4_4OVER6", "NVTE_NVFP4_4OVER6_E4M3_USE_256", "NVTE_NVFP4_4OVER6_ERR_MODE")
ON = ("weights", "all")


@listing_options
def miles(*, env: Mapping[str, str] | None = None) -> Contract:
    """miles' converter. `env`: the environment variables that miles reads; they preset the method.

    `NVTE_NVFP4_4OVER6` = weights or all turns 4over6 on. Then e4m3_max is 256, unless `NVTE_NVFP4_4OVER6_E4M3_USE_256`
    is set to something other than weights or all. `NVTE_NVFP4_4OVER6_ERR_MODE` is MAE or MSE.
    """
    check_choice(f"env is a mapping of environment variables, not {env!r}", env is None or isinstance(env, Mapping))
    given = dict(env or {})
    for variable in given:
        check_name("environment variable of miles", variable, VARIABLES)
    method: Method = Amax()
    if given.get("NVTE_NVFP4_4OVER6") in ON:
        narrow = given.get("NVTE_NVFP4_4OVER6_E4M3_USE_256", "all") in ON
        method = FourSix(error_name(given.get("NVTE_NVFP4_4OVER6_ERR_MODE", "MAE")), 256 if narrow else 448)
    return Contract(
        name="miles",
        source="miles (2026-08-21) on TransformerEngine 2.20.0.dev0",
        rules={"nvfp4": NVFP4},
        ragged="pad",
        method=method,
        options=changed(miles, {"env": env}),
    )
