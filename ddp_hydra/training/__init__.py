"""The training loop and its parts: the config chooses the parts, `setup` builds them, `loop` runs them.

loop            the loop
run             the parts of a run, and what the loop asks of them
train_step      the forward pass of a task, as a module
update          gradients become new weights; nonfinite and finite: what if they are not finite
consensus       what all ranks decide together
cadence         when to log, validate, save and end

setup           builds a run: build_data, build_updates and builders make its parts, instantiate its `_target_`s
parallel        averages gradients; on one host by shared_memory
parameter_groups  which parameters train, decay, and are computed twice
lr_schedules    learning rates, and how far the run is
ema             the moving average of the weights

state           what a checkpoint holds; resume puts it back, checkpoint writes and reads its file
metrics         sums over batches and ranks
monitor         measures the run; data_stats, memory and profiler are its parts
evaluation      evaluates a model during the training
callbacks       what users have called

inference       evaluate and predict; predictions: the columns
load_run        loads a trained model; export writes it for other programs
dry_run         builds everything once, for dry_run=true
"""
