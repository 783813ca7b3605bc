"""Link types that ComfyUI has no type for."""

from comfy_api.latest import io

ModelsSocket = io.Custom("SPECAR_MODELS")  # models.Models
ScheduleSocket = io.Custom("SPECAR_SCHEDULE")  # specar_core.job.Job without a prompt
ReportSocket = io.Custom("SPECAR_REPORT")  # the report of a run, a dictionary
