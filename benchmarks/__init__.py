"""How fast it is, measured against what the machine can do: `sgm-ppl bench`."""
