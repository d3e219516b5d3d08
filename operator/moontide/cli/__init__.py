"""`kubectl moontide` for people: fleets on one screen, dry runs, a doctor, timelines. Needs typer and rich.

A trainer's image has neither: there :mod:`moontide.cli.entry` gives the plain commands of :mod:`moontide.trainer.cli`.
"""
