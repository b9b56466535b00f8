"""Table of a basis: its errors at each quarter of the coordinates."""

from rich.console import Console
from rich.table import Table

from convert.calibration.calibrate import FEW_TOKENS
from zdc_jax.basis import Basis


def report_basis(console: Console, basis: Basis) -> None:
    """Print the certificate: relative error of scores and outputs at each quarter of the coordinates."""
    H = basis.k_map.shape[-1]
    table = Table(title=f"basis: QK {basis.qk_kind}, VO {basis.vo_kind}, {basis.num_tokens:,} tokens")
    for column in ("kept", "score error, mean", "worst head", "value error, mean", "worst head"):
        table.add_column(column, justify="right")
    for kept in sorted({-(-H * quarters // 4) for quarters in (1, 2, 3, 4)}):
        scores, values = basis.qk_error[..., kept], basis.vo_error[..., kept]
        table.add_row(
            str(kept), *(f"{x:.3f}" for x in (scores.mean(), scores.max(), values.mean(), values.max()))
        )
    console.print(table)
    worst = max(float(basis.qk_condition.max()), float(basis.vo_condition.max()))
    console.print(f"worst condition number of a head's basis: {worst:.3g}")
    if basis.num_tokens < FEW_TOKENS:
        console.print(
            f"inaccurate basis: calibrated on {basis.num_tokens:,} tokens; use at least {FEW_TOKENS:,}",
            soft_wrap=True,
        )
