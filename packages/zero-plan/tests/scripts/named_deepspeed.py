"""Train a decoder through DeepSpeed's names: the path of a configuration."""

import argparse

import deepspeed
import dry_models
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
deepspeed.add_config_arguments(parser)
arguments = parser.parse_args()
deepspeed.init_distributed()
with deepspeed.zero.Init(config_dict_or_path=arguments.deepspeed_config):
    model = dry_models.decoder()
engine, _, _, _ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
for step in range(100):
    tokens = torch.randint(dry_models.VOCABULARY, (dry_models.BATCH, dry_models.SEQUENCE)).to(engine.device)
    loss = engine(tokens, tokens)
    engine.backward(loss)
    engine.step()
    if loss.item() > 0 and deepspeed.comm.get_rank() == 0:
        print(step, engine.get_lr())
