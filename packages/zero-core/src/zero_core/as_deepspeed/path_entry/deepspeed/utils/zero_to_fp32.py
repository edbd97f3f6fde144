"""Whole fp32 weights of checkpoints, of this project's format and of DeepSpeed's."""

from zero_core.as_deepspeed.naming import names

_FOUND = {
    "convert_zero_checkpoint_to_fp32_state_dict": "zero_ckpt.zero_to_fp32:convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict": "zero_ckpt.zero_to_fp32:convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint": "zero_ckpt.zero_to_fp32:get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file": "zero_core.as_deepspeed.state_files:get_model_state_file",
    "get_model_state_files": "zero_core.as_deepspeed.state_files:get_model_state_files",
    "get_optim_files": "zero_core.as_deepspeed.state_files:get_optim_files",
    "load_state_dict_from_zero_checkpoint": "zero_ckpt.zero_to_fp32:load_state_dict_from_zero_checkpoint",
    "main": "zero_ckpt.zero_to_fp32:main",
}
__getattr__, __dir__ = names(__name__, _FOUND)

if __name__ == "__main__":
    import sys

    from zero_ckpt.zero_to_fp32 import main

    sys.exit(main())
