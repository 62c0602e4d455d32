"""File formats of schedules, clusters, profiles, models and measurements. Plan files are in `ir/plan/`.

schedule_json     schedules
schedule_csv      schedules of torch.distributed.pipelining
cluster_file      finds a cluster: preset, TOML or JSON
cluster_toml      reads a cluster
cluster_writer    writes a cluster
cluster_json      a cluster as JSON
profile_json      profiles of layers
profile_text      published profiles as text
model_json        layers of a model
measurement       measured runs
"""
