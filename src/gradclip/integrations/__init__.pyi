# For type checkers: each module is there without an import of its own.
from gradclip.integrations import brainstate as brainstate
from gradclip.integrations import declearn as declearn
from gradclip.integrations import flower as flower
from gradclip.integrations import jax_privacy as jax_privacy
from gradclip.integrations import keras as keras
from gradclip.integrations import lightning as lightning
from gradclip.integrations import lucid as lucid
from gradclip.integrations import mlx as mlx
from gradclip.integrations import opacus as opacus
from gradclip.integrations import optax as optax
from gradclip.integrations import tensorflow as tensorflow
from gradclip.integrations import torch as torch
from gradclip.integrations import transformers as transformers
