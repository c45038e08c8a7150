import json,sys,re
for f in sys.argv[1:]:
    d=json.load(open(f)); print("#####",f)
    for c in d["cells"]:
        s="".join(c["source"])
        if c["cell_type"]=="markdown": print(f"  {c['id']} MD {s}")
        elif s.startswith("#| export"):
            names=re.findall(r"^(?:def|class) (\w+)|^([A-Z_]+) ?[:=]",s,re.M); imp = not any(any(n) for n in names)
            print(f"  {c['id']} EXP {[a or b for a,b in names]}"); 
            if imp or 'import' in s.split('\n')[1]: print("      "+s.replace("\n","\n      "))
        else: print(f"  {c['id']} CODE {s if 'import' in s or 'default_exp' in s else s[:100]!r} out={len(json.dumps(c.get('outputs',[])))}")
