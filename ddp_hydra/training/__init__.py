"""The training loop and its parts: the config chooses the parts, `run` builds them, `loop` runs them.

loop            the loop; a dry run of it
run             the parts of a run, and what the loop asks of them
train_step      the forward pass of a task, as a module
update          weighed losses, gradients become new weights; finite looks at them, nonfinite says what then
seeds           what a model, a step and a validation draw
consensus       what all ranks decide together
cadence         when to log, validate, save and end

setup           describes a run; build_data, builders and optimizers make its parts
parallel        owns the model and its order among the ranks; ddp, dp and none are a file each
lr_schedules    learning rates, and how far the run is

state           what a checkpoint holds; checkpoint writes and reads its file
metrics         sums over batches and ranks
monitor         measures the run, and what the data costs; memory and profiler are its parts
evaluation      evaluates a model during the training
callbacks       what users have called

inference       evaluate and predict, with the columns of predictions
load_run        puts a checkpoint back into a run, or loads its model; export writes that for other programs
"""
