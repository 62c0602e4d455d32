"""Checkpoints that can be resumed under any plan, and exports for `from_pretrained`.

write                 writes a checkpoint
restore               finds, checks and loads a checkpoint
run_state             the state of a run under the model's names
checkpoint_facts      state.json
tensor_files          tensors as safetensors
folders               names, completeness and rotation of folders
folder_lock           one run at a time per folder
pretrained_weights    weights for `from_pretrained`
save_pretrained       exports a model
"""
