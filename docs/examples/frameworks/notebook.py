# The first cell of a notebook activates the names; everything after it is the user's own.
# %%
import zero_deepspeed

zero_deepspeed.activate()

# %%
import os

os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")

# %%
from corpus import Text, small_gpt2
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    output_dir="notebook-output", deepspeed="ds_zero3.json", max_steps=10, per_device_train_batch_size=8, report_to=[]
)
trainer = Trainer(model=small_gpt2(), args=arguments, train_dataset=Text())
print("final loss", trainer.train().training_loss)
