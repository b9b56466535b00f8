"""Systems that ZDC is compared with; the product imports none of them."""
