# ruff: noqa: F401
"""What programs of whole runs and their workers import, first what their fork servers do."""

import pandas
import pyarrow.parquet
import tabulate
import torch
import transformers.modeling_utils
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import antiphon.cli.app
import antiphon.engines.native.factory
import antiphon.learning.torch_learner
import antiphon.run.build
import antiphon.run.commands

get_checkpoint_conversion_mapping("llama")  # compiles the patterns of all families, once a process
