{{/* Prefill and decode nodes. All take a dict: root, role, of (the values of the role), and some of them leader. */}}

{{- define "kvrelay.isGroup" -}}
{{- if or (gt (int .of.hosts) 1) .root.Values.disaggregatedSet }}true{{ end -}}
{{- end }}

{{/* The pod template of a node on one host, of the leader of a node on several (leader: true), or of their other ranks. */}}
{{- define "kvrelay.nodePod" -}}
{{- $isWorker := and (eq (include "kvrelay.isGroup" .) "true") (not .leader) -}}
metadata:
  {{- include "kvrelay.podMetadata" . | nindent 2 }}
spec:
  {{- include "kvrelay.pod" . | nindent 2 }}
  containers:
    - name: {{ .role }}
      {{- include "kvrelay.container" . | nindent 6 }}
      {{- if gt (int .of.hosts) 1 }}
      # LeaderWorkerSet sets the two variables.
      command: [sh, -c, 'exec kvrelay {{ .role }} --node-rank "$LWS_WORKER_INDEX" --master-addr "$LWS_LEADER_ADDRESS"']
      {{- else }}
      args: [{{ .role }}]
      {{- end }}
      env:
        {{- include "kvrelay.environment" . | nindent 8 }}
        - {name: KVRELAY_ADVERTISE_HOST, value: $(POD_IP)}
        {{- if not $isWorker }}
        - {name: KVRELAY_NODE_ID, value: $(POD_NAME)}
        {{- end }}
        {{- with .of.dataPort }}
        - {name: KVRELAY_DATA_PORT, value: {{ . | quote }}}
        {{- end }}
        - {name: KVRELAY_TENSOR_PARALLEL_SIZE, value: {{ .of.tensorParallel | quote }}}
        {{- with .of.pipelineParallel }}
        - {name: KVRELAY_PIPELINE_PARALLEL_SIZE, value: {{ . | quote }}}
        {{- end }}
        {{- if gt (int .of.hosts) 1 }}
        - {name: KVRELAY_NNODES, value: {{ .of.hosts | quote }}}
        - {name: KVRELAY_MASTER_PORT, value: {{ .root.Values.masterPort | quote }}}
        {{- end }}
        {{- with include "kvrelay.options" . | trim }}
        {{- . | nindent 8 }}
        {{- end }}
      {{- if not $isWorker }}
      ports:
        - {name: control, containerPort: {{ .of.port }}}
        - {name: admin, containerPort: {{ .of.adminPort }}}
        {{- with .of.dataPort }}
        - {name: kv, containerPort: {{ . }}}
        {{- end }}
      {{- $probe := printf "tcp://127.0.0.1:%v" .of.port }}
      # Loading: up to half an hour. Then: the engine loop has completed an iteration in the last minute.
      startupProbe:
        exec: {command: [python, -m, common.node.healthcheck, {{ $probe | quote }}]}
        periodSeconds: 5
        timeoutSeconds: 6
        failureThreshold: 360
      readinessProbe: {exec: {command: [python, -m, common.node.healthcheck, {{ $probe | quote }}]}, periodSeconds: 15, timeoutSeconds: 6}
      livenessProbe: {exec: {command: [python, -m, common.node.healthcheck, {{ $probe | quote }}]}, periodSeconds: 30, timeoutSeconds: 6}
      lifecycle:
        # The node gets nothing new and finishes what runs. What lasts longer goes on at another node.
        preStop: {exec: {command: [sh, -c, 'kvrelay admin drain "$POD_NAME" --wait --timeout {{ .root.Values.drainSeconds }}']}}
      {{- end }}
      volumeMounts:
        {{- include "kvrelay.mounts" . | nindent 8 }}
        - {name: shared-memory, mountPath: /dev/shm}
  volumes:
    {{- include "kvrelay.volumes" . | nindent 4 }}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ .of.sharedMemory }}}
{{- end }}

{{/* The specification of a LeaderWorkerSet. */}}
{{- define "kvrelay.group" -}}
{{- if not .of.autoscaling.enabled }}
replicas: {{ .of.replicas }}
{{- end }}
# A rank that dies ends its node: the group starts again as a whole.
leaderWorkerTemplate:
  size: {{ .of.hosts }}
  restartPolicy: RecreateGroupOnPodRestart
  leaderTemplate:
    {{- include "kvrelay.nodePod" (merge (dict "leader" true) .) | nindent 4 }}
  workerTemplate:
    {{- include "kvrelay.nodePod" . | nindent 4 }}
rolloutStrategy:
  type: RollingUpdate
  rollingUpdateConfiguration: {maxUnavailable: 1, maxSurge: 0}
{{- end }}
