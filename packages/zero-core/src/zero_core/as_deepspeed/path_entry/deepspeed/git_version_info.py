"""What was built: nothing ahead of time."""

version = "0.19.8"
git_hash = git_branch = "zero_core"
installed_ops: dict[str, bool] = {}
accelerator_name = ""
torch_info: dict[str, str] = {}
