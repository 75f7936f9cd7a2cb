"""The training loop and its parts: the config chooses the parts, `setup` builds them, `loop` runs them.

loop            the loop
run             the parts of a run, and what the loop asks of them
train_step      the forward pass of a task, as a module
update          gradients become new weights; nonfinite and finite: what if they are not finite
consensus       what all ranks decide together
cadence         when to log, validate and save; early_stopping: when to end

setup           builds a run: build_data, build_updates and builders make its parts, instantiate its `_target_`s
header          what is known before the first step
parallel        averages gradients; on one host by shared_memory and host_barrier, laid out by gradient_buckets
parameter_groups  which parameters train, decay, and are computed twice
lr_schedules    learning rates; schedule_progress tells them how far the run is
ema             the moving average of the weights

state           what a checkpoint holds; resume puts it back, checkpoint writes and reads its file
metrics         sums over batches and ranks; monitor measures the run, monitoring/ its parts
evaluation      evaluates a model during the training
callbacks/      what users have called

inference       evaluate and predict; predictions: the columns
load_run        loads a trained model; export and export_example write it for other programs
dry_run         builds everything once, for dry_run=true
"""
