"""Functions that are replaced or refused while a model is traced.

replaced_attribute    replaces an attribute for a while
kept_attributes       restores attributes of the model
module_casts          casts of modules inside a forward
value_checks          `if labels.max() >= n: raise`
random_rates          comparisons of a random number with a rate
python_random         refuses Python's and numpy's random numbers
refuse                refuses gradient hooks and inner backwards
train_eval_modes      modules that differ in training and evaluation
torch_transformer     `nn.Transformer`
ctc_loss              CTC loss
user_lines            lines of the user's model, for errors
"""
